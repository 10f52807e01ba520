from components.training.parallel import Ranks, Shares, started  # noqa: D100, F401
