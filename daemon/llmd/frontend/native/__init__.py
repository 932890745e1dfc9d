"""SGLang's native interface: its sampling parameters, and the shape of its results."""
