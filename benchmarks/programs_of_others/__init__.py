"""Programs of public repositories as their authors wrote them, traced on a fake GPU.

``manifest.toml`` names them; ``README.md`` says how they are fetched and run.
"""
