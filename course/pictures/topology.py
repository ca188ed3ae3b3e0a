"""Draw what lies between the devices of a machine: CPU sockets with GPUs and network cards, and their links."""

from itertools import combinations

from course.measure.topology import Topology
from course.pictures.parts import titled
from course.pictures.scene import USUAL, WIDTH, Mark, Scene, box, label, line
from course.pictures.style import DP, FRAME, FRAME_FILL, GREY, PP, TP, tint
from course.table import Table
from labkit.sizes import counted

GAP, PAD, DEVICE, CARDS = 40.0, 14.0, 44.0, 96.0  # between sockets, around devices, a device, from GPUs down to cards


def draw_topology(topology: Topology, title: str) -> Scene:
    """Draw the sockets side by side, NVLinks above the GPUs, and the PCIe switches between a GPU and its cards."""
    sockets, frames, devices, places = topology.sockets(), [], [], {}
    links = [(i, j, topology.ways[i][j]) for i, j in combinations(range(len(topology.names)), 2)]
    top = 110 if any(way.startswith("NV") for *_, way in links) else 48
    width = (WIDTH - GAP * (len(sockets) - 1)) / len(sockets)
    bottom = top + 2 * PAD + DEVICE + CARDS * any("NIC" in name for name in topology.names)
    for number, socket in enumerate(sockets):
        left, middle = number * (width + GAP), (top + bottom) / 2
        frames.append(box(f"socket{number}", left, top, width, bottom - top, FRAME_FILL, edge=FRAME))
        frames.append(label(f"socket{number}.name", left + PAD, bottom + 12, f"CPU socket {number}"))
        if number:
            frames.append(line(f"sys{number}", [(left - GAP, middle), (left, middle)], PP, 4, means="SYS"))
        for depth, color in enumerate((TP, DP)):  # GPUs or cores, and below them the cards
            row = [i for i in socket if topology.names[i].startswith("NIC") == bool(depth)]
            for place, i in enumerate(row):
                each, name = (width - PAD) / len(row), topology.names[i]
                x, y = left + PAD + place * each, top + PAD + CARDS * depth
                ways = [f"{other} by {way}" for other, way in zip(topology.names, topology.ways[i]) if other != name]
                fact, places[i] = ", ".join(ways), (x + (each - PAD) / 2, y)
                fact = f"{name} reaches {fact}" if fact else f"{name}: all ranks work here"
                spot, words = (x, y, each - PAD, DEVICE), (name, name[3:])
                devices.append(box(f"device{i}", *spot, tint(color, 0.34), words, edge=FRAME, fact=fact))
    devices_on = f"{counted(len(topology.names), 'device')} on {counted(len(sockets), 'CPU socket')}"
    table = Table(("", *topology.names), [(name, *ways) for name, ways in zip(topology.names, topology.ways)])
    marks = frames + _nvlinks(links, places, top)
    for i, j, way in links:  # the shortest ways from a GPU to a card: one or several PCIe switches
        (a, y), (b, low) = sorted((places[i], places[j]), key=lambda place: place[1])
        if way in ("PIX", "PXB") and y < low:
            marks.append(line(f"pci{i}.{j}", [(a, y + DEVICE), (b, low)], GREY, 3, means="PCIe switch"))
            aside = 8 + USUAL / 2 * abs(a - b) / (low - y - DEVICE)  # the line leans by that much beside its word
            marks.append(label(f"pci{i}.{j}.word", (a + b) / 2 + aside, (y + DEVICE + low) / 2, way))
    return titled(title, f"{devices_on}, and the ways between them.", marks + devices, table, bottom=bottom + 20)


def _nvlinks(links: list[tuple[int, int, str]], places: dict[int, tuple[float, float]], top: float) -> list[Mark]:
    """Draw each NVLink as a bridge; one bar stands for all if every two GPUs have the same."""
    nvlinks = [link for link in links if link[2].startswith("NV")]
    gpus = sorted({gpu for i, j, _ in nvlinks for gpu in (i, j)})
    if len({way for *_, way in nvlinks}) == 1 and len(nvlinks) == len(gpus) * (len(gpus) - 1) / 2 > 1:
        left, right = places[gpus[0]][0] - 30, places[gpus[-1]][0] + 30
        word = f"{nvlinks[0][2]}: every GPU reaches every other one"
        bar = box("nvlink", left, top - 46, right - left, 24, tint(TP, 0.16), word, edge=TP)
        return [bar, *(line(f"nv{i}", [(places[i][0], top - 22), places[i]], TP, 3, means="NVLink") for i in gpus)]
    marks = []
    for i, j, way in nvlinks:
        (a, y), (b, _), high = places[i], places[j], top - 4 - 8 * min(j - i, 6)
        points, fact = [(a, y), (a, high), (b, high), (b, y)], f"{way} between GPU {i} and GPU {j}"
        marks.append(line(f"nv{i}.{j}", points, TP, 3, means="NVLink", fact=fact))
        marks.append(label(f"nv{i}.{j}.word", (a + b) / 2, high - 9, way, anchor="middle"))
    return marks
