"""Print how many tests passed and failed, from JUnit files, as the one closing line of `make test`.

usage: closing_line.py JUNIT_FILE... EXIT_STATUS_OF_PYTEST
"""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def counts(junit_xml: str) -> tuple[int, int, int]:
    """Tests that passed, that failed (in set-up or tear-down too), and that were skipped."""
    suites = list(ElementTree.fromstring(junit_xml).iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return max(total - failed - skipped, 0), failed, skipped


def main(*junit_files: str, pytest_status: str) -> int:
    paths = [Path(file) for file in junit_files]
    each = [counts(path.read_text()) if path.exists() else (0, 1, 0) for path in paths]  # pytest died before writing
    passed, failed, skipped = map(sum, zip(*each))
    if pytest_status != "0" and not failed:
        failed = 1  # it was interrupted, or could not collect anything
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:-1], pytest_status=sys.argv[-1]))
