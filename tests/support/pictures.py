"""What tests of pictures look for in a scene."""

from course.pictures.scene import SMALLEST, Mark, Scene, text_width


def marks(scene: Scene, prefix: str) -> list[Mark]:
    """Return the marks whose keys begin with this."""
    return [mark for mark in scene.marks if mark.key.startswith(prefix)]


def texts(scene: Scene, prefix: str) -> list[str]:
    """Return what is written in them."""
    return [mark.text for mark in marks(scene, prefix) if mark.text]


def lit(scene: Scene, key: str) -> set[str]:
    """Return the keys of the marks that light up when somebody points at one."""
    return tagged(scene, *scene.by_key[key].lights)


def tagged(scene: Scene, *tags: str) -> set[str]:
    """Return the keys of the marks with any of these tags."""
    return {mark.key for mark in scene.marks if {*tags} & {*mark.tags}}


def faults(scene: Scene) -> list[str]:
    """Return the marks that leave the picture, and those whose text is too small to read."""
    found = []
    for mark in scene.marks:
        is_label = mark.shape == "label"
        width = max(mark.width, text_width(mark.text, mark.size, mark.bold) * 0.95 * is_label)
        left = mark.x - width * is_label * {"start": 0, "middle": 0.5, "end": 1}[mark.anchor]
        if left < 0 or left + width > scene.width + 1 or mark.y < 0 or mark.bottom > scene.height:
            found.append(f"{mark.key} leaves the picture")
        if mark.text and mark.size < SMALLEST:
            found.append(f"{mark.key} is too small")
    return found
