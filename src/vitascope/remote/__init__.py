"""Objects in stores and on web servers: listed, read through a bounded cache, and written."""
