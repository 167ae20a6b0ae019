"""The colours of a timeline: cold ones for the worker's stages, warm ones for the service's."""

STAGE_COLOURS = {
    "dsa.stage": "#3b6fb6",
    "dsa.handback": "#5aa2c9",
    "dsa.attend": "#8f9fd6",
    "dsa.gate": "#a89f8d",
    "dsa.logits": "#d98a3d",
    "dsa.topk": "#c2603a",
    "dsa.answer": "#8a9a3b",
}
INCOMPLETE = "#9a9a9a"
ERROR = "#c01c28"
FINDING = "#c01c28"
EVENT = "#5e5c64"
