"""Pages over HTTP: the server, which sends long pages in pieces, and the pages about metrics, flow control and decisions."""
