"""What a reader of weight updates raises."""


class DeltaError(ValueError):
    """A blob is no update of the array it is applied to: damaged, of another array, or of a newer codec."""
