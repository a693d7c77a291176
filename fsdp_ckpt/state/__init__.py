"""Live training objects to state dicts and back. Knows neither storage nor commits."""

from fsdp_ckpt.state.data import ResumableSampler
from fsdp_ckpt.state.loader import make_loader
from fsdp_ckpt.state.progress import Progress
from fsdp_ckpt.state.rank_local import RankLocal
from fsdp_ckpt.state.stateful import Stateful
from fsdp_ckpt.state.train_state import TrainState

__all__ = ["Progress", "RankLocal", "ResumableSampler", "Stateful", "TrainState", "make_loader"]
