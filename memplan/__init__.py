"""memplan: does this training step fit on that GPU, and which batch size should it use?"""

__version__ = "0.1.0"
