"""Reports: the terminal, JSON, Markdown, JUnit and GitHub."""
