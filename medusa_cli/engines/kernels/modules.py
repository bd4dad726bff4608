"""A kernel's products in the place of a module's linear layers."""

from torch import Tensor, nn

from medusa_cli.engines.kernels.kernel import Kernel, Plain, Product


def pack_linears(module: nn.Module, kernel: Kernel) -> None:
    """Replace every plain nn.Linear in a module by the kernel's product, in place."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            # Quantised layers are subclasses of nn.Linear with weights of their own: only the exact type is safe.
            if type(child) is nn.Linear and not isinstance(kernel, Plain):
                setattr(parent, name, _PackedLinear(kernel.join([child]), child))


class _PackedLinear(nn.Module):
    """A frozen nn.Linear that keeps only its packed weight; for inference alone."""

    def __init__(self, product: Product, linear: nn.Linear) -> None:
        super().__init__()
        self.product = product
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.product(x)
        return found
