"""`audit`: what is wrong with the images of a data set, and how much of it is noticed."""
