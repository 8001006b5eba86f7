"""Who answers prompts: each engine is a dataclass with its settings and a method `run`; conf/engine/ chooses."""
