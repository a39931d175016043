"""What of ``run.py``'s configuration is declared in the code, for Hydra to read as if it were files of ``conf/``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from harness.config import has_schema, nodes

if TYPE_CHECKING:
    from hydra.core.config_search_path import ConfigSearchPath


class RunOptions(SearchPathPlugin):
    """Gives a configuration of ``run.py`` what is declared in the code; no other app is to list that among its own options."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the source behind the app's own folder."""
        # main is Hydra's name for the folder that the app itself has named.
        if any(element.provider == "main" and has_schema(element.path) for element in search_path.get_path()):
            # The first source that has an option is taken: a file of the user's wins over a declaration of that name.
            search_path.append("harness", "harness://run")


class Declared(ConfigSource):
    """The source. Hydra copies its whole ConfigStore for each question, of which ``--help`` asks 90: a store would be slow."""

    @staticmethod
    def scheme() -> str:
        """Return how its path begins."""
        return "harness"

    def available(self) -> bool:
        """Return that it is there."""
        return True

    def is_config(self, config_path: str) -> bool:
        """Return True for an option, or a part of the configuration that has no group."""
        return config_path.removesuffix(".yaml") in nodes()

    def is_group(self, config_path: str) -> bool:
        """Return True for a group, and for the root."""
        return bool(self.list(config_path, None))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return what lies in a group or at the root: options and parts, groups, or both."""
        prefix = f"{config_path.strip('/')}/".removeprefix("/")
        below = [path.removeprefix(prefix).partition("/") for path in nodes() if path.startswith(prefix)]
        kinds = {name: ObjectType.GROUP if slash else ObjectType.CONFIG for name, slash, _ in below}
        return sorted(name for name, kind in kinds.items() if results_filter in (None, kind))

    def load_config(self, config_path: str) -> ConfigResult:
        """Return an option, or a part of the configuration."""
        node = OmegaConf.structured(nodes()[config_path.removesuffix(".yaml")])
        # Hydra looks the key up in any case; None is what a file without a line on its package has.
        return ConfigResult(config=node, path=self.full_path(), provider=self.provider, header={"package": None})
