"""The papers' figures by simulation: `python -m benchmarks.papers` writes docs/papers.md."""
