"""The parts of `scripts/compare_accuracy.py`: the task, the model that starts on it, the runs and what they showed."""
