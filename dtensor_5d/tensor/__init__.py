"""The tensor axis: weights cut inside a layer (`style`), tokens cut between blocks (`sequence`), a cut vocabulary."""
