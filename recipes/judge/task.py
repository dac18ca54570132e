"""What is to be explained, to whom, and how briefly. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

SUBJECTS = (
    "why the sky is blue", "how a vaccine works", "what inflation is", "why ships float", "how a refrigerator cools", "what a database index is",
    "why seasons change", "how bread rises", "what compound interest is", "how a bicycle stays upright", "why leaves turn red", "how GPS finds a place",
    "what a hash function is", "why metal feels colder than wood", "how sound becomes an MP3 file", "what a mortgage is", "why the moon has phases", "how bees make honey",
    "what a prime number is", "why we yawn", "how soap removes grease", "what recursion is", "why popcorn pops", "how an election is counted",
)  # fmt: skip
HELD_OUT = 4  # subjects that no training sees
READERS = {
    "a child of six": "uses no word that a child of six does not know, and compares with something that a child has seen",
    "a busy manager": "begins with what matters in practice, and leaves out what does not",
    "a student in the first year": "names the principle behind it with its proper term, and says what the term means",
    "someone who believes the opposite": "is respectful, and gives a reason that can be checked",
}
LENGTHS = (2, 4)  # sentences at most


def rows(subjects: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row for each subject, reader and length."""
    return [
        {"prompt": f"Explain {subject} to {reader}, in at most {most} sentences.", "criteria": f"The explanation is true, and it {wanted}.", "sentences": most}
        for subject in subjects for reader, wanted in READERS.items() for most in LENGTHS
    ]  # fmt: skip


def train_rows() -> list[dict[str, Any]]:
    """The rows to learn from."""
    return rows(SUBJECTS[HELD_OUT:])


def val_rows() -> list[dict[str, Any]]:
    """The rows to be judged on."""
    return rows(SUBJECTS[:HELD_OUT])
