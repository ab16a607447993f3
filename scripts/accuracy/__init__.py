"""The parts of `scripts/compare_accuracy.py`: the task, the model that runs start from, the runs and their results."""
