"""The site of the documentation: pages that are made from the code, diagrams, and hooks of mkdocs."""
