"""The description that a package index shows: README.md without links into the repository. All else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

FILES = ""  # the address below which the repository's files are, with a "/" at its end; empty as long as there is none


def outside_the_repository(text: str) -> str:
    """Makes links to files of the repository absolute; without ``FILES`` their text remains.

    Pictures, and links to the README in other languages, are left out then.
    """

    def link(found: "re.Match[str]") -> str:
        picture, label, target = found.groups()
        if re.match(r"https?:|#", target):
            return found[0]
        if FILES:
            return f"{picture}[{label}]({FILES}{target})"
        return "" if picture or target.startswith("README.") else label

    return re.sub(r"(!?)\[([^]]*)\]\(([^)]*)\)", link, text)


setup(
    long_description=outside_the_repository(Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
