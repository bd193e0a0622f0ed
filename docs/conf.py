"""Makes the documentation site: ``sphinx-build -W --keep-going -b html docs build/docs``; needs ``pip install '.[docs]'``.

The pages are Markdown that GitHub shows as well. Only reference/api uses directives of Sphinx.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # a build starts nothing

import jieba
import torch.distributed
from bs4 import BeautifulSoup
from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx
from sphinx.search.zh import SearchChinese
from sphinx.transforms import SphinxTransform

import mpicoll
import mpicoll._api

project = "mpicoll"
author = "the mpicoll authors"
copyright = author
version = release = mpicoll.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
root_doc = "index"
exclude_patterns = ["recipes"]

html_theme = "furo"
html_title = f"mpicoll {version}"
html_copy_source = False
html_scaled_image_link = False  # thumbnails have links of their own
html_search_language = "zh"  # the class Words
smartquotes = False  # `--nproc-per-node` and "mpi" stay as one types them
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_exclude = ".linenos, .gp, .go"  # prompts, and what a command prints

# Links and anchors are those of GitHub. One that leads nowhere is a warning, and so an error.
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]  # <img>, which GitHub shows as well, has a width

# -- docstrings ------------------------------------------------------------------------------------------------------------

default_role = "py:obj"  # `name`: a link if there is such a name, code otherwise
add_module_names = False
autodoc_default_options = {"show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # SUM, not <RedOpType.SUM: 0>
autodoc_typehints = "signature"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_rtype = False

for kind in (torch.distributed.ProcessGroup, torch.distributed.ReduceOp, torch.distributed.Store, torch.distributed.Work):
    kind.__module__ = "torch.distributed"  # where torch documents it
Intracomm = type("Intracomm", (), {"__module__": "mpi4py.MPI"})
for info in pkgutil.iter_modules([os.path.dirname(mpicoll._api.__file__)], "mpicoll._api."):
    module = importlib.import_module(info.name)  # it imports these names for type checkers only
    vars(module).update(Work=torch.distributed.Work, Op=torch.distributed.ReduceOp, Store=torch.distributed.Store)
    vars(module).update(MPI=SimpleNamespace(Intracomm=Intracomm), MessageWork=torch.distributed.Work)

# -- other projects --------------------------------------------------------------------------------------------------------

intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
    "mpi4py": ("https://mpi4py.readthedocs.io/en/stable", None),
}
intersphinx_timeout = 5  # seconds

# A name of ours that is nowhere is an error. Names of others have no target where their inventories cannot be reached.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:obj", r".*"),
    (r"py:.*", r"(torch|mpi4py|collections|typing|subprocess|pathlib|os|datetime|enum)\..*"),
    (r"py:class", r"mpicoll\.(rpc\.rref|_launch\.spawn|testing)\.T|mpicoll\._api\.p2p\.P"),  # type variables
    (r"py:class", r"Tensor|Work|Op|DebugHandler"),  # of functions that also name types which are imported for type checkers only
]


def _no_network_is_no_error(record: logging.LogRecord) -> bool:
    """Makes information of the warning that inventories cannot be reached. It has no type that suppress_warnings could name."""
    if "failed to reach any of the inventories" in str(record.msg):
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


class LinksThatLeave(SphinxTransform):
    """Links to what is in the repository and not on the site: a file becomes a download, of a folder the text remains.

    MyST itself makes downloads of files, except of Markdown.
    """

    default_priority = 200

    def apply(self, **kwargs: Any) -> None:
        for link in list(self.document.findall(pending_xref)):
            if link.get("reftype") != "myst" or link["reftarget"] in self.env.found_docs:
                continue
            if link.get("refdomain") == "doc":  # the target is a path without .md, from docs/ or absolute
                path = os.path.relpath(os.path.join(self.env.srcdir, f"{link['reftarget']}.md"), self.env.srcdir)
                link.replace_self(download_reference("", "", *link.children, reftarget=f"/{path}"))
            elif os.path.isdir(self.env.relfn2path(link["reftarget"].partition("#")[0], self.env.docname)[1]):
                link.replace_self(nodes.inline("", "", *link.children[0].children))


OF_THE_ROOT = {"project/contributing": "CONTRIBUTING.md", "project/changelog": "CHANGELOG.md"}


def _take_text_of_the_root(app: Sphinx, docname: str, source: list[str]) -> None:
    """Gives a page the text of a file in the root of the repository, whose links lead from there."""
    if docname in OF_THE_ROOT:
        path = os.path.join(app.srcdir, "..", OF_THE_ROOT[docname])
        app.env.note_dependency(path)
        with open(path, encoding="utf-8") as file:
            source[0] = re.sub(r"\]\((?!https?:|#)", "](../../", file.read())


# The sidebar. On GitHub, where index.md is the map, the directives would show.
SIDEBAR = {
    "Start": "start/install start/quickstart start/concepts",
    "Tutorials": "tutorials/messages tutorials/collectives tutorials/data-parallel tutorials/*",
    "Guides": "guides/launching guides/clusters guides/supercomputers guides/choices guides/after-gloo guides/migration guides/* "
    "troubleshooting sharp-bits performance sites security",
    "Reference": "reference/api/index reference/* glossary",
    "Examples": "examples",
    "中文": "zh/index",
    "Project": "architecture",
}
FOLDED = {  # pages below others
    "examples": "examples/*",
    "zh/index": "zh/install zh/quickstart zh/concepts zh/messages zh/collectives zh/data-parallel zh/*",
    "architecture": "project/*",
}
TOCTREE = """
```{{toctree}}
:hidden:
:glob:
:caption: {caption}

{pages}
```
"""


def _add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    groups = SIDEBAR if docname == "index" else {docname: FOLDED[docname]} if docname in FOLDED else {}
    for caption, pages in groups.items():
        source[0] += TOCTREE.format(caption=caption, pages="\n".join(f"/{page}" for page in pages.split()))


# What stands around a Chinese page: the words of the theme, and the captions of the sidebar
CHINESE = {
    "Search": "搜索",
    "On this page": "本页内容",
    "Next": "下一页",
    "Previous": "上一页",
    "Home": "首页",
    "Back to top": "回到顶部",
    "Skip to content": "跳到正文",
    "Start": "入门",
    "Tutorials": "教程",
    "Guides": "指南（英文）",
    "Reference": "参考（英文）",
    "Examples": "示例（英文）",
    "Project": "项目（英文）",
}
ORIGINAL = re.compile(r"^\[English\]\(\.\./(.*?)\.md\)", re.MULTILINE)
TRANSLATED = {page for chinese in Path(__file__).parent.glob("zh/*.md") for page in ORIGINAL.findall(chinese.read_text("utf-8"))}


def _say_it_in_chinese(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document) -> None:
    """Gives a Chinese page a Chinese search box, and a sidebar of the Chinese pages, then of those without a translation."""
    if not pagename.startswith("zh/"):
        return
    context["language"] = "zh-CN"
    context["gettext"] = lambda text: CHINESE.get(text, text)
    tree = BeautifulSoup(context["furo_navigation_tree"], "html.parser")
    for link in tree.find_all("a"):
        page = os.path.normpath(os.path.join(os.path.dirname(pagename), link["href"])).removesuffix(".html")
        if page in TRANSLATED:
            link.find_parent("li").decompose()
    for caption in tree.find_all("p", class_="caption"):
        pages = caption.find_next_sibling("ul")
        if caption.text == "中文":
            tree.insert(0, pages.extract())
            tree.insert(0, caption.extract())
        elif pages.find("li") is None:
            pages.decompose()
            caption.decompose()
        else:
            caption.span.string = CHINESE[caption.text]
    context["furo_navigation_tree"] = str(tree)


class Words(SearchChinese):
    """Finds English words, and by jieba those of the Chinese pages, whose dictionary lacks our word for to hang."""

    language_name = "English"  # of the stemmer in the browser; Sphinx 9.0 would ask for a Chinese one, which does not exist


SOURCES = re.compile(r"^Source: (\[examples/.*)$", re.MULTILINE)
PROGRAM = """
<details{open}><summary><code>{path}</code></summary>

```{{literalinclude}} /../{path}
:language: {language}
```

</details>
"""
SHORT = 50  # lines of a program that is shown unfolded


def _show_programs(app: Sphinx, docname: str, source: list[str]) -> None:
    """Shows the programs to which a line "Source: [examples/..." links, instead of the links. GitHub shows the line as it is."""

    def program(path: str) -> str:
        with open(os.path.join(app.srcdir, "..", path), encoding="utf-8") as file:
            unfolded = " open" if len(file.readlines()) <= SHORT else ""
        return PROGRAM.format(open=unfolded, path=path, language="python" if path.endswith(".py") else "bash")

    source[0] = SOURCES.sub(lambda line: "".join(map(program, re.findall(r"\[([^]]+)\]", line[1]))), source[0])


# A program or a command with its output, in the words of its first line, which another page has
SHARED = re.compile(r"^(?:程序：|命令和输出：|Program: |Output: )\[`(.+)`\]\((.+\.md)(?:#.*)?\)$", re.MULTILINE)


def _share_programs(app: Sphinx, docname: str, source: list[str]) -> None:
    """Shows blocks of another page, instead of the links to them that GitHub shows."""

    def block(line: re.Match[str]) -> str:
        page = Path(app.srcdir, docname).parent / line[2]
        app.env.note_dependency(str(page))
        wanted = re.compile(rf"^```\w+\n[#$] {re.escape(line[1])}\n.*?^```$", re.MULTILINE | re.DOTALL)
        found = wanted.search(page.read_text("utf-8"))
        assert found is not None, f"{docname}: {page} has no block {line[1]}"
        return found[0]

    source[0] = SHARED.sub(block, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    logging.getLogger("sphinx.sphinx.ext.intersphinx").addFilter(_no_network_is_no_error)
    app.add_transform(LinksThatLeave)
    jieba.add_word("挂起")
    app.add_search_language(Words)
    app.connect("source-read", _take_text_of_the_root)
    app.connect("source-read", _add_contents)
    app.connect("source-read", _show_programs)
    app.connect("source-read", _share_programs)
    app.connect("html-page-context", _say_it_in_chinese, priority=900)  # after the theme has made the sidebar
    return {"parallel_read_safe": True, "parallel_write_safe": True}
