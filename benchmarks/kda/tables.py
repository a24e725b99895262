"""Puts the records of `bench` into README.md: `uv run python benchmarks/kda/tables.py`.

Reads every *.jsonl here in the order of names; of the TPU estimates the last one of a case counts.
A table stands between the lines `<!-- COMMAND -->` and `<!-- end -->`.
"""

import json
import re
from pathlib import Path

from k3jax.pallas_kernels.kda import bench_tables

HERE = Path(__file__).parent


def markdown(rows: list[dict]) -> str:
    """A table; the columns are the keys of the first row."""
    if not rows:
        return "Not measured yet."
    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])]
    lines += [" | ".join(map(str, row.values())) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    records = [
        json.loads(line)
        for file in sorted(HERE.glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]

    def table(match: re.Match) -> str:
        rows = bench_tables.rows(match[1], records)
        return f"<!-- {match[1]} -->\n\n{markdown(rows)}\n\n<!-- end -->"

    readme = HERE / "README.md"
    text = re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", table, readme.read_text(), flags=re.S)
    readme.write_text(text)


if __name__ == "__main__":
    main()
