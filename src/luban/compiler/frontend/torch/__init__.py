"""PyTorch's front end: FX graphs of ATen operators become `graph` modules."""

from luban.compiler.frontend.torch.decompositions import table
from luban.compiler.frontend.torch.importer import Imported, import_graph, unsupported

__all__ = ["Imported", "import_graph", "table", "unsupported"]
