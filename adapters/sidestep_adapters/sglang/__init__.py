"""SGLang: the plugin that taps its metric collectors."""
