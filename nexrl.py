"""Where NexRL itself is not installed, its name leads to nexrl_sdk: `from nexrl.trainer import ...`, `python -m nexrl.main ...`."""

from nexrl_sdk.compat import stand_in

stand_in(__name__)
