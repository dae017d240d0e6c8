"""What PyPI shows of a release: the addresses of the project, and README with whole addresses in links and pictures.

The workflow of a release says where the repository is: JAXPAR_REPOSITORY is such as https://github.com/owner/name. A
build without it, as of a checkout, leaves README as it is and names no address.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class PyPI(MetadataHookInterface):
    """A hook of Hatchling, which calls `update` with the table `[project]`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the fields that pyproject.toml calls dynamic."""
        text, urls = Path(self.root, "README.md").read_text(), {}
        if repository := os.environ.get("JAXPAR_REPOSITORY", "").rstrip("/"):
            tag = f"v{metadata['version']}"
            # Of a picture the file itself, of a page what shows it.
            text = re.sub(r"(\]\(|src(?:set)?=\")(docs/pictures/)", rf"\1{repository}/raw/{tag}/\2", text)
            text = re.sub(r"\]\((?!https?:|#)", f"]({repository}/blob/{tag}/", text)
            urls = {
                "Source": repository,
                "Documentation": f"{repository}/blob/{tag}/docs/index.md",
                "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls
