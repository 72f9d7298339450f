"""What is computed for a request, and what of it a client gets, in no API's form."""
