"""All prompt templates, one or more modules per category."""

from data.samples.templates import (
    everyday,
    explanations,
    extraction,
    lists,
    opinions,
    python_lists,
    python_numbers,
    python_other,
    python_strings,
    python_words,
    reasoning,
    rewriting,
    word_problems_counts,
    word_problems_money,
    word_problems_rates,
    writing,
)
from data.samples.templates.base import Template

MODULES = (
    word_problems_money,
    word_problems_rates,
    word_problems_counts,
    python_strings,
    python_words,
    python_numbers,
    python_lists,
    python_other,
    explanations,
    opinions,
    rewriting,
    lists,
    writing,
    everyday,
    reasoning,
    extraction,
)
ALL_TEMPLATES: list[Template] = [template for module in MODULES for template in module.TEMPLATES]
