"""Looking inside models, and counting what they cost."""

from vit_keras.analysis.attention import attention_scores as attention_scores
from vit_keras.analysis.complexity import flops as flops
