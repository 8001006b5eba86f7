# The rooms of `python -m data.doctor`: one file for each thing that is looked at.
