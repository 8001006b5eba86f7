"""Lightning distillation of a drafter from target states."""
