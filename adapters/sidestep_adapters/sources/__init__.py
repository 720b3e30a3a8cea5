"""What runs inside the exporter: subscribers to the streams that engines publish by themselves."""
