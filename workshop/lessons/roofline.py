"""The roofline of notebook 4b: the highest speed that each kernel can reach on a GPU, as a table and as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

from phase2_triton.kernels.core import Cost


@dataclass(frozen=True)
class PeakRates:
    """The published peak rates of a GPU: its memory bandwidth, and its FLOPs per second with and without tensor cores.

    Attributes:
        bandwidth: bytes per second of the device memory.
        matrix_flops: FLOPs per second of the tensor cores, bfloat16, dense.
        scalar_flops: FLOPs per second in fp32, outside the tensor cores.
    """

    bandwidth: float
    matrix_flops: float
    scalar_flops: float

    def get_peak(self, is_matmul: bool) -> float:
        """Return the FLOPs per second for matrix products, or for other arithmetic."""
        return self.matrix_flops if is_matmul else self.scalar_flops

    def compute_roof(self, intensity: Tensor, is_matmul: bool) -> Tensor:
        """Return the highest possible FLOPs per second at this arithmetic intensity."""
        return torch.minimum(intensity * self.bandwidth, torch.tensor(self.get_peak(is_matmul)))


@dataclass(frozen=True)
class Point:
    """A pass of a kernel in the roofline plot.

    Attributes:
        name: of the kernel.
        pass_name: forward, backward, or all.
        cost: bytes and FLOPs.
        is_matmul: whether tensor cores do nearly all of its FLOPs.
        seconds: the shortest possible time.
    """

    name: str
    pass_name: str
    cost: Cost
    is_matmul: bool
    seconds: float

    @property
    def bytes_moved(self) -> int:
        """Bytes that the kernel reads and writes."""
        return self.cost.read + self.cost.written

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.cost.flops / self.bytes_moved


def compute_points(costs: Mapping[str, Sequence[Cost]], matmuls: Sequence[str], gpu: PeakRates) -> list[Point]:
    """Return the points of all passes of all kernels.

    Args:
        costs: for each kernel, the cost of its forward and backward pass, or of everything together.
        matmuls: names of the kernels whose FLOPs run on the tensor cores.
        gpu: the GPU.
    """
    points = []
    for name, passes in costs.items():
        for pass_name, cost in zip(("forward", "backward") if len(passes) == 2 else ("all",), passes, strict=True):
            is_matmul = name in matmuls
            seconds = cost.seconds(gpu.bandwidth, gpu.get_peak(is_matmul))
            points.append(Point(name, pass_name, cost, is_matmul, seconds))
    return points


def print_points(points: Sequence[Point], gpu: PeakRates) -> None:
    """Print the intensity and the shortest possible time of each point, and whether memory or FLOPs decide it."""
    ridge = gpu.matrix_flops / gpu.bandwidth
    print("ridge points of an H100, from published numbers:")
    scalar_ridge = gpu.scalar_flops / gpu.bandwidth
    print(f"{ridge:.0f} FLOPs per byte for matrix products, {scalar_ridge:.0f} for other arithmetic\n")
    print("kernel                    pass       memory   compute     intensity       minimum time   bound by")
    print("                                       (MB)  (GFLOPs)  (FLOPs/byte)     (microseconds)")
    for point in points:
        bound = "memory" if point.seconds == point.bytes_moved / gpu.bandwidth else "compute"
        print(f"{point.name:25} {point.pass_name:8} {point.bytes_moved / 1e6:8,.0f}", end="")
        print(f" {point.cost.flops / 1e9:9,.1f} {point.intensity:13.1f} {point.seconds * 1e6:18,.0f}   {bound}")
        assert (bound == "compute") == (point.is_matmul and point.intensity > ridge)


def draw_roofline(points: Sequence[Point], gpu: PeakRates, alternatives: Mapping[str, tuple[str, float]]) -> None:
    """Draw the roofline and all points, and zoom on the ridge point.

    Args:
        points: the passes of all kernels.
        gpu: the GPU.
        alternatives: for some kernels, a label and the bytes that the forward pass would move in another version.
    """
    figure, (full_axes, zoom_axes) = plt.subplots(1, 2, figsize=(11, 5), width_ratios=(5, 3))
    names = list(dict.fromkeys(point.name for point in points))
    colors = {name: plt.get_cmap("tab10")(i) for i, name in enumerate(names)}
    for axes in (full_axes, zoom_axes):
        draw_roof(axes, gpu)
        for name in names:
            axes.plot([], [], "o", color=colors[name], label=name)
        for point in points:
            marker = {"forward": "^", "backward": "v", "all": "o"}[point.pass_name]
            rate = point.cost.flops / point.seconds / 1e12
            axes.plot(point.intensity, rate, marker, color=colors[point.name], markersize=9, alpha=0.8)
    for name, (label, bytes_moved) in alternatives.items():
        point = next(each for each in points if each.name == name)
        intensity = point.cost.flops / bytes_moved
        rate = gpu.compute_roof(torch.tensor(intensity), point.is_matmul).item() / 1e12
        full_axes.plot(intensity, rate, "^", color=colors[name], markerfacecolor="white", markersize=9)
        full_axes.text(intensity / 1.4, rate * 1.1, label, ha="right", fontsize=9)
    full_axes.set(xscale="log", yscale="log", title="Roofline of an H100: GPT-2 124M, 16,384 tokens")
    zoom_axes.set(xlim=(230, 400), ylim=(780, 1010), title="Zoom on the ridge point")
    figure.legend(*zoom_axes.get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    plt.show()


def draw_roof(axes: Axes, gpu: PeakRates) -> None:
    """Draw the two roofs and the ridge point of the tensor cores."""
    intensities = torch.logspace(-1.5, 3, 400)
    for is_matmul, unit, style in ((True, "tensor cores", "-"), (False, "other arithmetic", "--")):
        label = f"{unit}: {gpu.get_peak(is_matmul) / 1e12:.0f} TFLOP/s"
        axes.plot(intensities, gpu.compute_roof(intensities, is_matmul) / 1e12, style, color="#555555", label=label)
    axes.axvline(gpu.matrix_flops / gpu.bandwidth, color="#999999", linestyle=":", linewidth=1)
    axes.set(xlabel="arithmetic intensity (FLOPs per byte)", ylabel="highest possible speed (TFLOP/s)")
    axes.spines[["top", "right"]].set_visible(False)
