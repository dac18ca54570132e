"""Installs nexrl_sdk; every value is read from settings.ini, which nbdev reads too."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

ini = ConfigParser(delimiters=["="], interpolation=None)
ini.read("settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
extras = {name: cfg[f"{name}_requirements"].split() for name in ("dev", "vllm", "tinker", "weaver", "ray", "track", "rewards", "docs")}

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author=cfg["author"],
    url=cfg["git_url"],
    keywords=cfg["keywords"].split(),
    packages=find_packages(include=["nexrl_sdk", "nexrl_sdk.*"]),
    py_modules=["nexrl"],  # leads code and commands of NexRL here, where NexRL itself is not installed
    package_data={"nexrl_sdk": ["py.typed"]},
    include_package_data=True,
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require=extras,
    entry_points={"console_scripts": cfg["console_scripts"].split()},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    zip_safe=False,
)
