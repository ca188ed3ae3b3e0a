"""A table shows its first rows, and folds the others where it can be unfolded."""

import re

import pytest

from course.table import Table


@pytest.mark.parametrize(("num_shown", "open_rows", "words"), [
    (None, 5, []), (5, 5, []), (7, 5, []), (2, 2, ["The other 3 rows"]),
])  # fmt: skip
def test_rows_beyond_those_that_are_shown_are_folded_in_html(num_shown, open_rows, words):
    table = Table(["row"], [[f"D{number}"] for number in range(5)], "runs", num_shown=num_shown)
    shown, *folded = table.html.split("<details>")
    assert len(re.findall(r"<td>", shown)) == open_rows and len(re.findall(r"<td>D\d", table.html)) == 5
    assert re.findall(r"<summary>(.*?)</summary>", table.html) == words and len(folded) == len(words)
    assert table.html.count("runs") == 1 and str(table).count("\n") == 6
