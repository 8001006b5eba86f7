# Errors a user can cause. Each message names the dotted key, the value got, what is accepted, and what to do.
# Everything else that raises is a bug of ours.

__all__ = ["CheckpointError", "ConfigError", "DataError", "DraftersError"]


class DraftersError(Exception):
    """Base of every error that a user can cause; doors print it without a traceback and exit with code 1."""


class ConfigError(DraftersError):
    """A setting is unknown, of the wrong type, out of range, or does not fit another one."""


class DataError(DraftersError):
    """Conversations, prompts or cached states are missing, malformed, damaged, or belong to another target."""


class CheckpointError(DraftersError):
    """Weights or a run directory are missing, damaged, in use, or do not fit the configuration."""
