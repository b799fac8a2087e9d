"""Hooks of MkDocs for `make docs`: pages from outside docs/, local scripts, and a check for external requests.

ARCHITECTURE.md and its neighbours are read where they are and become pages in `project/`. A link to another file of the
repository becomes its path. Scripts that the theme loads from another host are replaced by those that `scripts/docs.sh`
fetched; without them, diagrams are shown as text.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.exceptions import PluginError  # type: ignore[import-not-found]  # only `make docs` installs it
from mkdocs.structure.files import File, Files  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "build" / "docs" / "scripts"
"""Fetched scripts: mermaid.min.js draws diagrams; iframe-worker.js lets the search work without a server."""
PAGES = {
    **{
        f"{name}.md": f"project/{name.replace('/', '-').lower()}.md"
        for name in ("ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "README", "SECURITY", "tests/README")
    },
    "bench/README.md": "project/benchmarks/index.md",
    **{
        f"bench/results/{path.name}": f"project/benchmarks/{path.name}"
        for path in sorted((ROOT / "bench" / "results").glob("*.md"))
    },
}
"""Pages outside docs/, by their path in the repository -> their path on the site."""
PLOTS = {f"bench/plots/{path.name}": f"project/plots/{path.name}" for path in (ROOT / "bench" / "plots").glob("*.svg")}
"""Plots of the benchmarks, likewise."""
TITLES = {"How to": "How-to guides", "Decisions": "Design decisions"}
_REQUEST = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^\"' >]+")
"""Requests of a browser to another host when it shows a page; ordinary links are not requested."""
_SHIM = re.compile(r'<script src="https://unpkg\.com/iframe-worker/shim"></script>')
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s:]+)\)")
_IMAGE = re.compile(r"!\[([^\]]*)\]\((docs/[^)\s:]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/ and their plots, and the script that draws diagrams."""
    for source, target in (PAGES | PLOTS).items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    for script in sorted(SCRIPTS.glob("*.js")):
        files.append(File.generated(config, f"assets/{script.name}", content=script.read_bytes()))
        if script.name == "mermaid.min.js":
            config.extra_javascript.append(f"assets/{script.name}")
    return files


def on_nav(nav: Any, config: Any, files: Files) -> Any:
    """Put the sections into the order in which readers need them."""
    del config, files
    index = (ROOT / "docs" / "index.md").read_text()

    def place(item: Any) -> int:
        """Where the start page links to it; pages without a link are last."""
        at = index.find(f"({item.file.src_uri})") if item.is_page else 0
        return at if at >= 0 else len(index)

    for item in nav.items:
        if item.is_section:  # the titles of pages are not known yet
            item.title = TITLES.get(item.title, item.title)
            item.children.sort(key=place)
    order = ["Tutorials", "How-to guides", "Reference", "Explanation", "Design decisions", "Development", "Project"]
    nav.items.sort(key=lambda item: order.index(item.title) + 1 if item.title in order else 0)
    return nav


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    del config
    here = page.file.src_uri
    sources = {target: source for source, target in PAGES.items()}
    source = sources.get(here, f"docs/{here}")

    def target_of(link: str) -> str | None:
        path, hash_, anchor = link.partition("#")
        if not path:
            return link
        named = normpath(str(PurePosixPath(source).parent / path))
        found = (PAGES | PLOTS).get(named) or (named.removeprefix("docs/") if named.startswith("docs/") else None)
        if found is None or files.get_file_from_path(found) is None:
            return None
        return relpath(found, PurePosixPath(here).parent) + hash_ + anchor

    def link(match: re.Match[str]) -> str:
        target = target_of(match[2])
        return f"{match[1]} (`{match[2].lstrip('./')}`)" if target is None else f"[{match[1]}]({target})"

    def image(match: re.Match[str]) -> str:
        return f"![{match[1]}]({target_of(match[2])})"

    return _LINK.sub(link, _IMAGE.sub(image, markdown))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Replace the script from another host. Raises PluginError if the page would request anything else from one."""
    del config
    root = relpath("assets/iframe-worker.js", PurePosixPath(page.file.dest_uri).parent)
    has_shim = (SCRIPTS / "iframe-worker.js").exists()
    output = _SHIM.sub(f'<script src="{root}"></script>' if has_shim else "", output)
    found = _REQUEST.search(output)
    if found is not None:
        raise PluginError(f"{page.file.src_uri} requests {found[0]}")
    return output
