"""Model families: configuration, the decoder, and the file formats that weights come in."""
