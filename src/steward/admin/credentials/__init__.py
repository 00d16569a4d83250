"""Who is who without the kernel's word: login links, sessions of browsers, tokens of programs."""
