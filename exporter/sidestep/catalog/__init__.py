"""What a catalogue row says, how rows become a layout of series, and the bounds of buckets."""
