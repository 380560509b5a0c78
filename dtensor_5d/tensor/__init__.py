"""The tensor axis: one layer's weights and one token's logits cut over ranks."""
