"""Answers: the requests that compute them, and their text and findings, in no API's form."""
