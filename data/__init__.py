"""Data that is bundled with the project."""
