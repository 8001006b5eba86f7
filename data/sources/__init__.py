"""Conversations from files and from the Hugging Face hub, whatever shape their rows have."""

from data.sources.config import SourceConfig
from data.sources.load import load_conversations, load_part, load_splits
from drafters.splits import ONLINE, DataConfig, split_conversations

__all__ = [
    "ONLINE",
    "DataConfig",
    "SourceConfig",
    "load_conversations",
    "load_part",
    "load_splits",
    "split_conversations",
]
