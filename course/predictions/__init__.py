"""What the notebooks ask their readers to predict: a file has one notebook's questions and typical wrong answers."""
