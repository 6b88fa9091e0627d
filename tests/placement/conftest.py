from tests.support.redis_server import redis_server, redis_settings

__all__ = ["redis_server", "redis_settings"]
