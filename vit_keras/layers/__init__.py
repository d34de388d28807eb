"""Registered Keras layers; each can be used alone in a functional model."""

from vit_keras.layers.attention import MultiHeadSelfAttention as MultiHeadSelfAttention
from vit_keras.layers.grid_tables import GridTables as GridTables
from vit_keras.layers.interpolation import interpolation_matrix as interpolation_matrix
from vit_keras.layers.interpolation import resize_patch as resize_patch
from vit_keras.layers.interpolation import resize_table as resize_table
from vit_keras.layers.interpolation import square_grid as square_grid
from vit_keras.layers.mlp import MLP as MLP
from vit_keras.layers.patches import Patches as Patches
from vit_keras.layers.positions import AddPositionEmbs as AddPositionEmbs
from vit_keras.layers.positions import RelativePositions as RelativePositions
from vit_keras.layers.regularization import DropPath as DropPath
from vit_keras.layers.regularization import LayerScale as LayerScale
from vit_keras.layers.resnet import Bottleneck as Bottleneck
from vit_keras.layers.resnet import StdConv2D as StdConv2D
from vit_keras.layers.resnet import group_norm as group_norm
from vit_keras.layers.tokens import AttentionPooling as AttentionPooling
from vit_keras.layers.tokens import ClassToken as ClassToken
from vit_keras.layers.tokens import DistillationToken as DistillationToken
from vit_keras.layers.tokens import DistilledOutputs as DistilledOutputs
from vit_keras.layers.tokens import RegisterTokens as RegisterTokens
from vit_keras.layers.tokens import TokenPooling as TokenPooling
from vit_keras.layers.transformer import TransformerBlock as TransformerBlock
from vit_keras.layers.walk import walk as walk
