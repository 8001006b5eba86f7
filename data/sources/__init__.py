"""Conversations from files and from the Hugging Face hub, whatever shape their rows have."""

from data.sources.config import ONLINE, DataConfig, SourceConfig
from data.sources.load import load_conversations, load_part, load_splits, split_conversations

__all__ = [
    "ONLINE",
    "DataConfig",
    "SourceConfig",
    "load_conversations",
    "load_part",
    "load_splits",
    "split_conversations",
]
