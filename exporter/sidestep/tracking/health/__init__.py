"""The health of engines, from the progress that their processes report; pure, time is data."""
