"""Every colour of the report, declared once: in charts, drawings, pages of runs and explorables a
colour has one meaning.

Okabe and Ito's palette ("Color Universal Design", 2008); instead of its yellow, Tol's wine red.
"""

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#4D4D4D", "#882255")
BLUE, VERMILION, GREEN, PINK, SKY, AMBER, GRAPHITE, WINE = PALETTE
GRAY, PALE = "#9aa3ad", "#c8ced6"
# What stands instead on a dark page, where these two could hardly be seen.
ON_DARK = {GRAPHITE: "#747a80", WINE: "#c4457f"}

# What fills the memory of a step: the parts of a predicted peak, and what the allocator holds idle.
MEMORY_COLORS = {
    "weights": BLUE,
    "gradients": AMBER,
    "optimizer": PINK,
    "activations": GREEN,
    "loss": SKY,
    "FSDP buffers": VERMILION,
    "messages": WINE,
    "kernel scratch": GRAPHITE,
    "libraries": GRAY,
    "unused reserve": PALE,
}
# Kinds of kernels, as traces name them and as readers do.
KERNEL_COLORS = {
    "matmul": BLUE,
    "attention": GREEN,
    **dict.fromkeys(("norm/pointwise", "norms, pointwise"), AMBER),
    "optimizer": PINK,
    **dict.fromkeys(("fp8 cast", "fp8 casts"), WINE),
    "loss": SKY,
    "communication": VERMILION,
    **dict.fromkeys(("memcpy", "fsdp copies"), GRAPHITE),
    **dict.fromkeys(("other", "other, idle"), GRAY),
}
# These two, what limits an operation, whose a number is, and what it says.
COLORS = {
    **MEMORY_COLORS,
    **KERNEL_COLORS,
    "arithmetic": BLUE,
    "memory": AMBER,
    "baseline": GRAY,
    "ours": BLUE,
    "peer": VERMILION,
    "good": GREEN,
    "bad": WINE,
}
GPU_COLORS = {"H100": SKY, "H200": WINE, "CPU": GRAPHITE}
